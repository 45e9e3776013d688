"""What TorchRec's own test of sharded models checks, with its messages compressed.

`test_model_parallel_gloo.py` calls `sharding_single_rank_test_single_process`, which TorchRec's
wheel has: a sharded model trains a step and predicts as the whole one does.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints
from torchrec.modules.embedding_configs import DataType

from bitslab.integrations.torchrec import CommunicationReport, compress_communication
from tests.integrations.torchrec.ranks import device

_TESTS = "torchrec.distributed.tests"
#: Checks by name: how tables are sharded, and what differs.
SUITE: dict[str, tuple[str, dict[str, Any]]] = {
    "table_wise": ("table_wise", {}),
    "table_wise-uneven": ("table_wise", {"variable_batch_size": True}),
    "table_wise-by_feature": ("table_wise", {"variable_batch_per_feature": True}),
    "column_wise": ("column_wise", {"mean": True}),
    "column_wise-uneven": ("column_wise", {"variable_batch_size": True}),
    "row_wise": ("row_wise", {}),
    "halves": ("table_wise", {"data_type": DataType.FP16}),
}
#: Those that run each time: a second each.
FEW = ("table_wise-uneven", "row_wise")


def check(name: str) -> None:
    """Run one of the SUITE on this rank."""
    # The wheel leaves out the sequence models, which none of these checks makes.
    sequences = mock.MagicMock()
    left_out = {f"{_TESTS}{name}": sequences for name in ("", ".test_sequence_model")}
    with mock.patch.dict(sys.modules, {n: m for n, m in left_out.items() if n not in sys.modules}):
        _check(name)


def _check(name: str) -> None:
    from torchrec.distributed.test_utils import test_sharding
    from torchrec.distributed.test_utils.test_model import TestSparseNN
    from torchrec.distributed.test_utils.test_model_parallel import ModelParallelTestShared

    sharding, options = SUITE[name]
    options = dict(options)
    case: Any = ModelParallelTestShared()
    where, group = device(), dist.group.WORLD
    case.setUp(backend=dist.get_backend())
    case._build_tables_and_groups(data_type=options.pop("data_type", DataType.FP32))
    tables = case.mean_tables if options.pop("mean", False) else case.tables
    weighted = None if "variable_batch_per_feature" in options else case.weighted_tables
    bags = test_sharding.SharderType.EMBEDDING_BAG_COLLECTION.value
    constraints = None
    if sharding == "column_wise":
        constraints = {table.name: ParameterConstraints(min_partition=4) for table in tables}
    reports: list[CommunicationReport] = []

    def made(*arguments: Any, **given: Any) -> DistributedModelParallel:
        model = DistributedModelParallel(*arguments, **given)
        reports.append(compress_communication(model, codec="compressed"))
        return model

    with mock.patch.object(test_sharding, "DistributedModelParallel", made):
        test_sharding.sharding_single_rank_test_single_process(
            pg=group,
            device=where,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            model_class=TestSparseNN,
            embedding_groups=case.embedding_groups,
            tables=tables,
            weighted_tables=weighted,
            sharders=[test_sharding.create_test_sharder(bags, sharding, "fused", device=where)],
            optim=EmbOptimType.EXACT_SGD,
            constraints=constraints,
            random_seed=7,
            **options,
        )
    (report,) = reports
    assert report.compressed and not report.left, report
    for stats in report.stats().values():
        assert stats["forward"]["calls"] > 0 < stats["backward"]["calls"]
