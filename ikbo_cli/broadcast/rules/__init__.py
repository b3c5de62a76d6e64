"""One file per op family. A new aten op is one function in one of these files."""
