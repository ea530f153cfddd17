"""What a plugin is: a frozen pydantic model that is its own configuration, and one or two methods.

State that changes while decoding lives beside the plugin and is forked with its row; the plugin itself never changes.
``decodekit.testing`` has the laws of each kind as executable checks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, model_validator
from torch import Tensor

from decodekit.core.candidates import Candidate, Deciding
from decodekit.core.constraint import CompiledConstraint
from decodekit.core.drafts import DraftHost, DraftState
from decodekit.core.errors import Refused
from decodekit.core.search import Advance, Group
from decodekit.core.types import Branch, Need, Outputs, Request, Rows
from decodekit.core.vocabulary import Vocabulary


class Plugin(BaseModel):
    """Base of all plugins. Subclasses declare ``kind: Literal["their_name"] = "their_name"`` and their options as fields.

    Attributes:
        cost: what it costs, for the tables, such as ``1 forward a token``.
        needs: what it must be given beyond logits; a name that is no ``Need`` is an input of its own, given in ``dk_inputs``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cost: ClassVar[str] = ""
    needs: ClassVar[frozenset[Need | str]] = frozenset()

    kind: str

    @model_validator(mode="wrap")
    @classmethod
    def _by_kind(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Makes ``inner: TokenStrategy`` accept any installed strategy as ``{kind: ..., ...}`` or by its bare name."""
        from decodekit.core import registry  # it needs the classes of this module

        for group, bases in registry.GROUPS.items():
            if cls in bases:
                return cast(Self, registry.build(group, value, cls))
        return handler(value)

    def resolve(self, tokenizer: Any) -> Self:
        """This plugin with its texts turned into token ids; called once, before the prompt is prefilled.

        Args:
            tokenizer: the model's tokenizer; ``None`` when none was given.

        Raises:
            InputError: a text cannot be used as given, or needs a tokenizer that is not there.
        """
        return self


class Rule(Plugin):
    """Changes the logits of each position on its own: a penalty, a warper, a ban.

    A token already at ``-inf`` stays there. The given tensor may be shared: return a new one. A ``RowError`` ends the rows
    for which it is raised: a call that raises one is repeated for each position alone.

    Attributes:
        sampling_only: reshapes what is sampled from, so that greedy decoding skips it.
        keeps_best: a ``sampling_only`` rule never drops the most likely token; some do so on purpose.
        capturable: a CUDA graph can hold it. A graph repeats the operations of one call and runs no Python: such a rule reads
            nothing but its fields, the tensors of ``rows``, ``rows.eos`` and the logits, and never asks the device for a number
            (``.item()``, ``.tolist()``, ``if tensor:``). Others are decoded step by step.
    """

    sampling_only: ClassVar[bool] = False
    keeps_best: ClassVar[bool] = True
    capturable: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        """[P, V] logits to [P, V] logits of the same dtype."""

    def as_filter(self) -> tuple[Literal["temperature", "top_k", "top_p", "min_p"], float] | None:
        """Which filter of the ``sample`` kernel does the same, and its value; ``None``: none does."""
        return None

    def init_state(self, request: Request) -> Any:
        """The state of a new row; ``None`` for a stateless rule. States are values: never changed in place."""
        return None

    def commit(self, state: Any, token: int, logits: Tensor) -> Any:
        """The state after ``token`` was chosen from ``logits`` [V] (the final ones of its position)."""
        return state


class TokenStrategy(Plugin):
    """Scores the next token from the outputs of one or more cached branches."""

    def branches(self, request: Request) -> tuple[Branch, ...]:
        """The cached streams that a sequence of this request needs, the one named ``main`` first."""
        return (Branch("main", request.prompt_ids),)

    def models(self) -> tuple[str, ...]:
        """The other models that branches run on: ids, folders, or names for ``Decoder.bind(models=...)``.

        They are fed the tokens of the main model, so they must have its vocabulary.
        """
        return ()

    def hidden_layers(self, config: Any) -> tuple[int, ...]:
        """The hidden layers (0 is the embedding, N the last) that ``score`` reads.

        Args:
            config: the text configuration of the model.

        Raises:
            Refused: this model cannot be decoded this way.
        """
        return ()

    @abstractmethod
    def score(self, outputs: Outputs) -> Tensor:
        """[P, V] scores; stateless and for any positions, so that drafts can be verified and graphs captured."""


def plain_decoding() -> TokenStrategy:
    """The token-level strategy where none is named."""
    from decodekit.core import registry  # it needs the classes of this module

    return cast(TokenStrategy, registry.create("strategies", f"{registry.OWN_DISTRIBUTION}:sample"))


class SearchStrategy(Plugin):
    """Keeps a group of hypotheses of one prompt: beams, contrastive search.

    ``step`` sees the group after each forward and says which hypotheses live on and with which token. A subclass says how
    many live at most (``width``) and which token-level strategy scores them (``inner``).

    Attributes:
        samples: it can draw (``do_sample``).
        reads_prompt: ``step`` reads hidden states over the whole prompt, so that none of it may come from a prefix cache.
    """

    samples: ClassVar[bool] = False
    reads_prompt: ClassVar[bool] = False

    inner: TokenStrategy = Field(default_factory=plain_decoding, description="scores the next token of a hypothesis")

    @property
    @abstractmethod
    def width(self) -> int:
        """Most hypotheses that live at once."""

    def hidden_layers(self, config: Any) -> tuple[int, ...]:
        """The hidden layers that ``step`` reads, as :meth:`TokenStrategy.hidden_layers`."""
        return ()

    @abstractmethod
    def step(self, group: Group) -> Advance:
        """Which hypotheses live on, and what each is fed; none ends the search.

        Raises:
            RowError: this prompt cannot be decoded.
        """


class SequenceStrategy(Plugin):
    """Decides between whole outputs of the inner strategy: self-consistency, best-of-N, minimum Bayes risk."""

    inner: TokenStrategy = Field(default_factory=plain_decoding, description="decodes each candidate")

    @property
    @abstractmethod
    def count(self) -> int:
        """Most candidates of a prompt."""

    @property
    def confidence_top_k(self) -> int:
        """How many of the most likely tokens a candidate's confidences are means of; 0 for none."""
        return 0

    @abstractmethod
    def decide(self, request: Request) -> Deciding:
        """Start candidates, watch them, choose; see ``decodekit.core.candidates`` for what is yielded and sent.

        Raises:
            RowError: nothing can be chosen for this prompt.
        """


class Constraint(Plugin):
    """A language that the output must belong to."""

    after: str | None = Field(None, min_length=1, description="a text that the output is free until, such as </think>")

    def violation(self, text: str) -> str | None:
        """What a finished text breaks that masks could not enforce, in one line; ``None`` where nothing."""
        return None

    @abstractmethod
    def compile(self, vocabulary: Vocabulary) -> CompiledConstraint:
        """This language as masks over a vocabulary.

        Raises:
            UnsupportedConstraint: it cannot be enforced as given; names the keywords.
            InputError: it is no language, such as a pattern with a syntax error, or one without any text.
        """


class Drafter(Plugin):
    """Proposes tokens that the target model verifies; whatever it proposes, the output is that of plain decoding.

    Attributes:
        cheap: proposing costs next to nothing, so that it is asked even where drafts may be cut afterwards.
        reads_prompt: its ``hidden_layers`` are read over the whole prompt too, by :meth:`DraftState.prefilled`.
    """

    cheap: ClassVar[bool] = True
    reads_prompt: ClassVar[bool] = False

    max_tokens: int = Field(5, ge=1, le=256, description="most tokens of a draft")
    schedule: Literal["constant", "heuristic", "dynamic"] = Field(
        "dynamic",
        description="length of drafts: always max_tokens; two longer after full acceptance and one shorter else; or what "
        "measured acceptance and seconds make fastest, which may be none",
    )

    def models(self) -> tuple[str, ...]:
        """The other models that it runs: ids, folders, or names for ``Decoder.bind(models=...)``."""
        return ()

    def hidden_layers(self, config: Any) -> tuple[int, ...]:
        """The target's hidden layers that ``observe`` reads, as :meth:`TokenStrategy.hidden_layers`."""
        return ()

    @abstractmethod
    def start(self, host: DraftHost) -> DraftState:
        """What it keeps for the rows of a call.

        Raises:
            Refused: it cannot draft for this model.
        """


class Scorer(Plugin):
    """Rates the candidates of one prompt; higher is better. NaN is no score."""

    @abstractmethod
    def score(self, prompt: str, candidates: Sequence[Candidate]) -> Sequence[float]:
        """[N] scores; ``prompt`` is the text as it was given."""


class Utility(Plugin):
    """Rates hypotheses against references, on the 0-100 scale of its reference implementation."""

    @abstractmethod
    def pairwise(self, hypotheses: Sequence[str], references: Sequence[str]) -> Tensor:
        """[N, M] utilities, float64."""

    def aggregated(self, hypotheses: Sequence[str], references: Sequence[str], weights: Tensor) -> Tensor:
        """[N] float64 utilities against one reference that stands for all of them, made of their weighted statistics.

        Args:
            hypotheses: N texts.
            references: M texts.
            weights: [M], summing to one.

        Raises:
            Refused: this utility has no statistics that could be averaged.
        """
        raise Refused(f"utility {self.kind!r} cannot aggregate its references; leave aggregate out")
