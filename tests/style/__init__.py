"""The checker of docs/style.md: prose of changed files, and subjects of commits."""
