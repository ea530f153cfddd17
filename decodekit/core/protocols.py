"""What a plugin is: a frozen pydantic model that is its own configuration, and one or two methods.

State that changes while decoding lives beside the plugin and is forked with its row; the plugin itself never changes.
``decodekit.testing`` has the laws of each kind as executable checks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from typing import Any, ClassVar, Self, cast

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, model_validator
from torch import Tensor

from decodekit.core.constraint import CompiledConstraint
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

    A token already at ``-inf`` stays there. The given tensor may be shared: return a new one.

    Attributes:
        sampling_only: reshapes the distribution without changing its argmax, so that greedy decoding skips it.
        capturable: has no host synchronisation, so that a CUDA graph can hold it.
    """

    sampling_only: ClassVar[bool] = False
    capturable: ClassVar[bool] = True

    @abstractmethod
    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        """[P, V] logits to [P, V] logits of the same dtype."""

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


class SearchStrategy(Plugin):
    """Keeps a group of hypotheses of one prompt: beams, contrastive search.

    ``step`` sees the group after each forward and says which rows live on and with which token.
    """

    @abstractmethod
    def step(self, group: Any) -> tuple[Sequence[int], Sequence[int]]:
        """The parents [R'] (rows of the group, in any order, with repeats) and the token [R'] that each is fed."""


class SequenceStrategy(Plugin):
    """Decides between whole outputs: self-consistency, best-of-N, minimum Bayes risk."""

    @abstractmethod
    def decide(self, request: Request) -> Generator[Any, Any, Any]:
        """Yields what is to be started, cancelled or waited for; is resumed with progress and finished outputs; returns
        the decision.
        """


class Constraint(Plugin):
    """A language that the output must belong to."""

    @abstractmethod
    def compile(self, vocabulary: Vocabulary) -> CompiledConstraint:
        """This language as masks over a vocabulary.

        Raises:
            UnsupportedConstraint: it cannot be enforced as given; names the keywords.
            InputError: it is no language, such as a pattern with a syntax error, or one without any text.
        """


class Drafter(Plugin):
    """Proposes tokens that the target model verifies."""

    @abstractmethod
    def start(self, session: Any) -> Any:
        """A fresh state with ``propose(rows, budgets)``, ``observe(...)`` and ``rollback(...)``."""


class Scorer(Plugin):
    """Rates the candidates of one prompt; higher is better."""

    @abstractmethod
    def score(self, prompt: str, candidates: Sequence[str]) -> Sequence[float]:
        """[N] scores."""


class Utility(Plugin):
    """Rates hypotheses against references, on the 0-100 scale of its reference implementation."""

    @abstractmethod
    def pairwise(self, hypotheses: Sequence[str], references: Sequence[str]) -> Tensor:
        """[N, M] utilities."""
