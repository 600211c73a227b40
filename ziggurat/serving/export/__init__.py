"""An export folder on disk: manifest, models, tensors, and programs made of them."""
