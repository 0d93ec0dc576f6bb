"""Runs a script with words that depend on the rank: by_rank.py SCRIPT WORD... , WORD_OF_RANK_0... , WORD_OF_RANK_1...

sleep=SECONDS among a rank's own words delays it.
"""

import os
import runpy
import sys
import time

parts: list[list[str]] = [[]]
for word in sys.argv[1:]:
    if word == ",":
        parts.append([])
    else:
        parts[-1].append(word)
own = parts[1 + int(os.environ["RANK"])]
for delay in [word for word in own if word.startswith("sleep=")]:
    time.sleep(float(delay.removeprefix("sleep=")))
    own.remove(delay)
sys.argv = parts[0] + own
runpy.run_path(sys.argv[0], run_name="__main__")
