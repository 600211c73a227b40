"""Executes plans over torch.distributed; never searches for one."""
