"""Computes plans; never touches a process group. A plan is data (`ziggurat.plan`)."""
