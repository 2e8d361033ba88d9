"""From a blueprint to a drafter, on rank 0: the tokenizers compared, the draft model loaded whole."""

from __future__ import annotations

from pathlib import Path

from comm.single import SingleCommunicator
from engine.byte_text import ByteText
from engine.drafts.depth import AdaptiveDepth, Depth, FixedDepth, StepCosts
from engine.drafts.model import ModelDrafter
from engine.drafts.ngram import NgramDrafter
from engine.drafts.speculation import Drafter, Speculation
from engine.eager import EagerStep
from engine.kv_cache import KvCache
from engine.loading import Blueprint, load_blueprint_weights, scheduler_limits
from engine.memory import kv_budget_bytes, page_bytes
from engine.pages import PagePool
from engine.settings import MAX_ADAPTIVE_DRAFTS
from engine.text import Text
from engine.weights import shard_bytes
from launch.errors import ModelError, UsageError

# The draft's KV cache beside the target's, unless its size is given. A token of a draft a tenth of the target's size takes about
# a tenth of the bytes, so this is room for more rows than the target has.
DRAFT_KV_SHARE = 0.25
# The `StepCosts` of a GPU and a CPU, but for `draft`. `make bench-speculate BATCH="1 4 16 32" TRIALS="0:1 0:3"` measures them:
# there a step without guesses takes `plain_tpot_ms`, its verification `verify_ms`, a row's guess `draft_ms` over their number; of
# answers that are long enough for the end not to count, where fewer drafts are due. Measured with 7B, and 72B at five tokens.
# - VERIFY_COST: of having any to verify, other products and one kernel more a layer.
# - TOKEN_COST: of a token among the first 16. A CPU multiplies for each; its number is a guess.
# - MANY_COST: of a token behind them, where matrix units multiply.
VERIFY_COST = {"cuda": 0.09, "cpu": 0.0}
TOKEN_COST = {"cuda": 0.015, "cpu": 0.15}
MANY_COST = {"cuda": 0.003, "cpu": 0.15}
DRAFT_COST = 3.0  # a small draft's step takes longer than its bytes say, by this factor; with a 0.5B draft beside 72B
# Of a layer of a draft model that is split over ranks: what an H200 could read beside the layer's own bytes, 110 MB in the 24 us
# that a layer of the 0.5B takes beyond its reads (same records), and 40 MB during its two sums. The sums are not measured there.
SPLIT_LAYER_BYTES = 150e6


def check_same_tokens(blueprint: Blueprint, text: Text | ByteText) -> None:
    """Target and draft, if there is one, must mean the same by an id; the number of vocabulary rows may differ.

    `text`: the target's. *Raises* `ModelError` naming both folders.
    """
    draft = blueprint.draft
    if draft is None:
        return
    folder = Path(draft.settings.model)
    draft_text = Text.load(folder) if folder.is_dir() else ByteText(draft.config.full_vocab)
    if draft_text.fingerprint != text.fingerprint:
        raise ModelError(
            f"the draft model {draft.settings.model} has another tokenizer than {blueprint.settings.model}, so its guesses would "
            "mean other text; give a draft model of the same family"
        )


def build_speculation(blueprint: Blueprint, num_ids: int, is_on_device: bool = False) -> Speculation | None:
    """The drafter the settings ask for, loaded; None if they ask for none. On rank 0 only.

    `num_ids`: ids the target may choose. Call it before the target's KV cache is sized, which then sees what is left.
    `is_on_device`: the steps of bursts guess themselves (`speculates_on_device`), and nothing is loaded here.
    """
    settings = blueprint.settings
    drafter: Drafter | None
    if is_on_device:
        drafter = None
    elif blueprint.draft is not None:
        drafter = _build_model(blueprint, blueprint.draft, num_ids)
    elif settings.is_ngram:
        drafter = NgramDrafter()
    else:
        return None
    return Speculation(drafter, _depth(blueprint, is_on_device))


def _depth(blueprint: Blueprint, is_on_device: bool) -> Depth:
    num_drafts, draft = blueprint.settings.num_drafts, blueprint.graph_draft if is_on_device else blueprint.draft
    if num_drafts is not None:
        return FixedDepth(num_drafts)
    kind, cost = blueprint.device.type, 0.0
    if draft is not None:  # a step of few rows takes as long as its weights take to read
        target_bytes = shard_bytes(blueprint.config, blueprint.plan, blueprint.dtype, blueprint.is_fp8)
        draft_bytes = shard_bytes(draft.config, draft.plan, draft.dtype)
        if draft.plan.size == 1:
            draft_bytes *= DRAFT_COST
        else:
            draft_bytes += SPLIT_LAYER_BYTES * draft.config.num_layers
        cost = draft_bytes / target_bytes
    return AdaptiveDepth(MAX_ADAPTIVE_DRAFTS, StepCosts(cost, VERIFY_COST[kind], TOKEN_COST[kind], MANY_COST[kind]))


def _build_model(blueprint: Blueprint, draft: Blueprint, num_ids: int) -> ModelDrafter:
    config, plan, page_size = draft.config, draft.plan, draft.settings.page_size
    weights = load_blueprint_weights(draft)
    num_pages = _num_pages(blueprint, draft)
    kv = KvCache.allocate(
        config.num_layers, num_pages, page_size, plan.local_kv_heads, config.head_dim, draft.dtype, draft.device
    )
    pool = PagePool(num_pages, page_size, draft.settings.is_prefix_reuse, is_contiguous=draft.device.type == "cpu")
    backend = EagerStep(config, plan, weights, SingleCommunicator(), kv)
    return ModelDrafter(backend, pool, scheduler_limits(draft, num_pages), config.full_vocab, num_ids, draft.device)


def _num_pages(blueprint: Blueprint, draft: Blueprint) -> int:
    settings = blueprint.settings
    one_page = page_bytes(draft.config, draft.plan, draft.dtype, settings.page_size)
    budget = settings.draft_kv_memory_bytes
    if budget is None:
        budget = int(DRAFT_KV_SHARE * kv_budget_bytes(settings, blueprint.device, local_ranks=1))
    wanted = settings.max_batch * -(-draft.max_model_len // settings.page_size)
    num_pages = min(wanted, budget // one_page)
    if num_pages < 1:
        raise UsageError(
            f"the draft model's KV cache may have {max(budget, 0)} bytes, but one page needs {one_page}; give more with "
            "--draft-kv-memory"
        )
    return num_pages
