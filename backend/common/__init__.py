"""What every part of the backend uses: errors, threads, turns and tasks that last."""
