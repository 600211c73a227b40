"""From raw files to batches: readers, preprocessing, encoded data, loader, ledger, known data sets."""
