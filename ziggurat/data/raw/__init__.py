"""Raw files as chunks of columns: Parquet and text, bad rows named."""
