"""Next-item models: quality over seeds, and contestants that train epochs of MovieLens-1M."""
