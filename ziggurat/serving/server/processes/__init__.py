"""The processes of a server: one that holds the port, those that answer, and the lines that they send each other."""
