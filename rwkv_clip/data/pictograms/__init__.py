"""Emoji drawings from the npm registry as a small, real image-text data set."""
