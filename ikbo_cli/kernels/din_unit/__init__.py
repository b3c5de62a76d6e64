"""DIN attention unit over user histories, one kernel."""
