"""Write reminders.csv: 10,000 made up reminders, the same for the same seed.

python examples/reminders/generate.py [--seed 2014] [--rows 10000]
"""

import argparse
from pathlib import Path

from delayline.cli.demo import reminders

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=reminders.SEED)
    parser.add_argument("--rows", type=int, default=reminders.ROWS)
    arguments = parser.parse_args()
    path = Path(__file__).with_name("reminders.csv")
    reminders.write(path, reminders.generate(arguments.rows, arguments.seed))
    print(f"{arguments.rows:,} reminders in {path}")
