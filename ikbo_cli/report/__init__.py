"""What results look like on a terminal."""
