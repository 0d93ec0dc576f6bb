"""A classifier's predictions of validation data, in a file."""

import json
from pathlib import Path

import numpy as np

from mini_trainer.data.stores.disk import written_aside
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.objectives.objective import Objective


def write_predictions(path: Path, data: Mixture, objective: Objective, predictions: np.ndarray) -> None:
    """Writes a line per target: data set, row (from 1) and token (from 0), and the objective's prediction."""
    with written_aside(path) as (aside,), aside.open("w", encoding="utf-8") as file:
        for row, token, *prediction in predictions:
            source, number = data.locate(int(row))
            place = {"data": source.name, "row": number, "token": int(token)}
            file.write(json.dumps(place | objective.describe_prediction(np.array(prediction))) + "\n")
