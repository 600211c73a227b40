"""What placements cost: from constants of a machine (analytic), or learned from measurements on it."""
