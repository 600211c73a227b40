"""Pictures: found in folders, read only as far as needed, refused with a reason, written as progressive JPEG."""
