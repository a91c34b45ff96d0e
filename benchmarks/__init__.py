"""Figures as ratios in one run: what delayline adds to a raw loop over the same SQLite file and driver."""
