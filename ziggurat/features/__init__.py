"""What every layer speaks: schema (columns), inputs (tensors' names and sizes), batch (tensors)."""
