"""The queue of a server: deadlines, one thread that computes batches, what they cost, and less effort under load."""
