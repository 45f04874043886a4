"""Plans: who writes and who reads which boxes, as data made by pure functions."""
