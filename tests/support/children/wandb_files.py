"""W&B's offline runs as JSON: `python -m tests.support.children.wandb_files FOLDER`.

In a process of its own, since importing wandb beside torch and Ray takes ten seconds.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def offline_runs(folder: Path) -> list[dict[str, Any]]:
    """For each process that logged: its run, and one row per report."""
    records: Any = import_module("wandb.proto.wandb_internal_pb2")
    datastore: Any = import_module("wandb.sdk.internal.datastore")
    runs = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        store, kept = datastore.DataStore(), dict[str, Any](rows=[])
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            record = records.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                run = record.run
                kept |= {"id": run.run_id, "name": run.display_name, "project": run.project}
                kept["config"] = {x.key: json.loads(x.value_json) for x in run.config.update}
            if record.HasField("history"):
                row = {
                    x.key or "/".join(x.nested_key): json.loads(x.value_json)
                    for x in record.history.item
                }
                kept["rows"].append({n: x for n, x in row.items() if not n.startswith("_")})
        store.close()
        runs.append(kept)
    return runs


if __name__ == "__main__":
    sys.stdout.write(json.dumps(offline_runs(Path(sys.argv[1]))))
