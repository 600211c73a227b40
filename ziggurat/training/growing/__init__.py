"""Growing vocabularies in training: between the data and the step, on one rank or many, and in checkpoints."""
