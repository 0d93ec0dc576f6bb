"""process_data.py with smaller sections and chunks: small_sections.py SECTION_BYTES CHUNK_ROWS FLAG..."""

import runpy
import sys

from mini_trainer.data.rows import files

_, section_bytes, chunk_rows, *flags = sys.argv
files.SECTION_BYTES, files.CHUNK_ROWS = int(section_bytes), int(chunk_rows)
sys.argv = ["process_data.py", *flags]
runpy.run_path("process_data.py", run_name="__main__")
