"""What fits delayline into frameworks."""
