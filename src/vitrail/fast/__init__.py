"""What makes a built model fast, applied to it from outside."""
