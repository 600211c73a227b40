"""What tests use, ours and those of users."""
