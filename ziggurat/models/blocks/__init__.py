"""What models share: MLPs, cross networks, dot products, stacks of fields, heads."""
