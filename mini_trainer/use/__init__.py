"""Uses a run's results: generation, evaluation, curves and pages, exports to other formats.

In: models, adapters, metrics files, rows. Out: answers, scores with intervals, pages for a browser, GGUF files.
Nothing that trains imports from here.
"""
