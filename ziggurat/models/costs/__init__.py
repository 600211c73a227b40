"""What models cost: parameters and FLOPs, of a sample and by the lengths of its lists."""
