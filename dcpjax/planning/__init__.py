"""What fits on which layout and how fast it can be: from the config alone, from a checkpoint's headers, or measured."""
