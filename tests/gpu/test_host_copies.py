"""What steady decode asks of the host, counted: waits and copies a token, with graphs and without.

`python -m pytest -q -s tests/gpu/test_host_copies.py`, about 20 s; prints the counts. `test_graph_step.py` holds the same for
every wait of a burst, by making each an error.
"""

from __future__ import annotations

import pytest
import torch

from engine.profile.host_syncs import count_host_copies, count_host_syncs
from tests.gpu.graph_engine import STEPS, answer_on_gpu, open_replica
from tests.token_cases import Rows, save_mild_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

FEW, MANY = 9, 109  # tokens of an answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_mild_model(tmp_path_factory.mktemp("mild"))


def test_each_wait_inside_torch_counts_once():
    x = torch.ones(3, device="cuda")
    assert count_host_syncs(lambda: [torch.cuda.synchronize() for _ in range(5)]) == 5
    assert count_host_syncs(lambda: [torch.cuda.current_stream().synchronize(), x.sum().item(), torch.cuda.synchronize(0)]) == 3
    assert count_host_syncs(lambda: x.add_(1)) == 0


@pytest.mark.parametrize("batch", (1, 8))
@pytest.mark.parametrize("steps", STEPS)
def test_host_syncs_and_copies_a_token(folder, steps, batch):
    replica = open_replica(folder, steps, max_batch=batch, max_model_len=256)
    short, long = (Rows.draw([20] * batch, count) for count in (FEW, MANY))
    answer_on_gpu(replica, long.requests)

    def per_step(count) -> float:
        numbers = [count(lambda rows=rows: answer_on_gpu(replica, rows.requests)) for rows in (short, long)]
        assert None not in numbers, "nothing can be counted here"
        return (numbers[1] - numbers[0]) / (MANY - FEW)

    syncs, copies = per_step(count_host_syncs), per_step(count_host_copies)
    print(f"\n{steps}, {batch} rows: {syncs:g} host synchronisations and {copies:g} device-to-host copies a step")
    if steps == "eager":
        assert syncs >= 1 and copies >= 1, "what is counted is there to be seen"
    else:
        assert syncs == copies == 0
