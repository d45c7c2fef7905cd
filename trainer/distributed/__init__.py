"""The processes of a run: their groups, their signals, and who of them died."""
