"""The demo, from raw files to reports: models on one device, then towers on two emulated hosts."""
