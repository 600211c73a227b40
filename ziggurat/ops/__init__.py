"""Pure functions: a readable torch reference beside each fast version, with the same signature."""
