"""Problems with the options of trackers, callbacks and uploads."""

import re

from mini_trainer.options import CallbackOptions, ExportOptions, HubOptions, TrackingOptions, TrainOptions
from mini_trainer.options.urls import find_target_faults, is_url, split_scheme


def find_reporting_problems(options: TrainOptions) -> list[str]:
    """Problems with trackers, callbacks, and places of exports."""
    return [
        *find_tracking_problems(options.tracking),
        *find_callback_problems(options.callbacks),
        *find_hub_problems(options.hub),
        *find_upload_problems(options.exports),
    ]


def find_tracking_problems(o: TrackingOptions) -> list[str]:
    """Trackers that are given twice."""
    return [f"--track {name}: given twice" for name in dict.fromkeys(o.track) if o.track.count(name) > 1]


def find_callback_problems(o: CallbackOptions) -> list[str]:
    """Problems with callbacks: given twice, or not an import path."""
    paths = dict.fromkeys(o.callbacks)
    problems = [f"--callbacks {path}: given twice" for path in paths if o.callbacks.count(path) > 1]
    form = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
    wrong = [path for path in paths if not re.fullmatch(f"{form}:{form}", path)]
    return problems + [f"--callbacks {path}: must be package.module:Class, such as hooks:Notify" for path in wrong]


def find_hub_problems(o: HubOptions) -> list[str]:
    """An invalid repository name."""
    if o.push_to_hub is None:
        return []
    part = r"[A-Za-z0-9_](?:[A-Za-z0-9_.\-]*[A-Za-z0-9_])?"
    if len(o.push_to_hub) > 96 or not re.fullmatch(rf"(?:{part}/)?{part}", o.push_to_hub):
        return [f"--push-to-hub {o.push_to_hub}: must be NAME or OWNER/NAME, of letters, digits, and -, _ or . inside"]
    return []


def find_upload_problems(o: ExportOptions) -> list[str]:
    """Problems with the URL to upload exports to."""
    if o.upload_to is None:
        return []
    if not is_url(o.upload_to):
        return [f"--upload-to {o.upload_to}: must be a URL (s3://BUCKET/PATH or gs://BUCKET/PATH)"]
    if split_scheme(o.upload_to)[0] == "hf":
        return [f"--upload-to {o.upload_to}: give the repository by --push-to-hub, which makes each export a commit"]
    return find_target_faults(o.upload_to, flag="--upload-to")
