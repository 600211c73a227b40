"""Maps from ids to rows that grow: one state, a reference with a dict that defines what happens to it, and C++."""
