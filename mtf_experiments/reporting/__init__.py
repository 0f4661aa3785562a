"""What a run leaves behind and shows: run directories, metrics, console output."""
