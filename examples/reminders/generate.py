"""Write reminders.csv: 10,000 made up reminders, the same for the same seed.

python -m examples.reminders.generate [--seed 2014] [--rows 10000] [--to FILE]
"""

import argparse
from pathlib import Path

from examples.demo import reminders

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=reminders.SEED)
    parser.add_argument("--rows", type=int, default=reminders.ROWS)
    parser.add_argument("--to", type=Path, default=Path(__file__).with_name("reminders.csv"))
    arguments = parser.parse_args()
    reminders.write(arguments.to, reminders.generate(arguments.rows, arguments.seed))
    print(f"{arguments.rows:,} reminders in {arguments.to}")
