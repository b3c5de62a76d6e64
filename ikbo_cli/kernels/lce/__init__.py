"""Linear compression `W @ E` with the user part computed once per user."""
