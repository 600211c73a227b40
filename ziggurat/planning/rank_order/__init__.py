"""The order of ranks in a collective: what orders cost, the cheapest, and the hosts and racks that times show."""
