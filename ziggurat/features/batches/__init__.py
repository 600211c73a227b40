"""What is done with whole batches: check them, cut and join, permute, pack for a device, find what repeats."""
