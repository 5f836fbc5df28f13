"""Files that are handed to others."""
