"""Models over the graph of users and items."""
