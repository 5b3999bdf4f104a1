"""Runs inside the Python that has mxnet 1.9.1, with mxnet's own RecordIO classes.

    python mxnet_side.py write CASES.pickle PREFIX [DIE_AFTER]
    python mxnet_side.py exchange CASES.pickle PREFIX OTHER_PREFIX
    python mxnet_side.py read CASES.pickle PREFIX

`write` packs (key, label bytes or number, payload) records, and kills itself after DIE_AFTER of them. `exchange` does
that too, then reads OTHER_PREFIX and prints one JSON line per record; `read` does the latter alone.
"""

import hashlib
import json
import os
import pickle
import signal
import sys

import mxnet
import numpy as np


def write(cases_path, prefix, die_after=None):
    with open(cases_path, "rb") as file:
        cases = pickle.load(file)
    record = mxnet.recordio.MXIndexedRecordIO(prefix + ".idx", prefix + ".rec", "w")
    for number, (key, label, payload) in enumerate(cases, 1):
        label = np.frombuffer(label, np.float32) if isinstance(label, bytes) else label
        record.write_idx(key, mxnet.recordio.pack(mxnet.recordio.IRHeader(0, label, key, 0), payload))
        if number == die_after:
            os.kill(os.getpid(), signal.SIGKILL)
    record.close()


def read(prefix):
    record = mxnet.recordio.MXIndexedRecordIO(prefix + ".idx", prefix + ".rec", "r")
    for key in record.keys:
        header, payload = mxnet.recordio.unpack(record.read_idx(key))
        label = np.atleast_1d(np.asarray(header.label, np.float32))
        print(json.dumps([key, header.id, label.tobytes().hex(), hashlib.md5(payload).hexdigest()]))


if __name__ == "__main__":
    assert mxnet.__version__ == "1.9.1", mxnet.__version__
    if sys.argv[1] == "write":
        write(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    elif sys.argv[1] == "read":
        read(sys.argv[3])
    else:
        write(sys.argv[2], sys.argv[3])
        read(sys.argv[4])
