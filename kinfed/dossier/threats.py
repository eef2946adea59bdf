"""Guarantees in words: what the server learns of a site in each mode, and what the site trusts. They are rows of the
table in docs/threats.md, word for word; a test compares the two."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Threat:
    mode: str  # as its row is called there
    learns: str  # what the server learns of a client
    trusts: str  # whom or what the owner trusts


PLAIN, PRIVATE, SEARCH, SEARCH_SECURE, SECURE, USER, AT_NODES, SECURE_PRIVATE = (
    "plain", "private", "search", "search_secure", "secure", "user", "at_nodes", "secure_private",
)  # fmt: skip

THREATS = {
    PLAIN: Threat(
        "plain",
        "name, group, columns, shape and numbers of examples; every update exactly, from which single training "
        "examples can often be rebuilt; numbers of the method's own of each client; exact figures of evaluations, from "
        'which rows that models are evaluated on can be solved for; with scaling = "standard" exact sums, or '
        "statistics and categories of columns",
        "the server with the data, in effect",
    ),
    PRIVATE: Threat(
        "example-level privacy asked for by the run (dp-noise, dp-epsilon)",
        "updates with noise made at the node. Figures of test rows are exact, and so are numbers of the method's own",
        "the run to ask for it; no one with the noise",
    ),
    SEARCH: Threat(
        'a search (method = "fit")',
        "as in plain; exact sums of columns and figures also of training rows, in divisions that the server chooses, "
        "so that every row can be solved for. Owners who demand anything below refuse it",
        "the server with the data",
    ),
    SEARCH_SECURE: Threat(
        'a search under secure sums (method = "fit" with secure-sum)',
        "the exact sum of all sites' updates of every try, and no single one; beside it exact sums of columns and "
        "figures of every site, also of training rows, in divisions that the server chooses, so that every row can be "
        "solved for. Owners who demand anything below refuse it",
        "the server with the data",
    ),
    SECURE: Threat(
        "secure sums (secure-sum)",
        "the exact sum of at least three clients' updates, who is in it, numbers of examples, exact figures of "
        "evaluations of each client: of the rows that its owner keeps for the test, under "
        "require_secure_aggregation; otherwise of those that a run chooses. No number of the method's own of a single "
        "client",
        "fewer conspirators than the threshold allows; that the run asks for it, unless require_secure_aggregation",
    ),
    USER: Threat(
        "user-level privacy (user-noise, user-epsilon)",
        "every update, or with secure sums their exact sum: the server adds the noise. ε is for people who see "
        "its models and nothing else",
        "the server",
    ),
    AT_NODES: Threat(
        "secure sums with noise from the nodes (user-at-nodes; demanded by the owner: user_epsilon)",
        "sums of at least three clients with noise at least z; who is in them, numbers of examples, and exact figures "
        "of evaluations unless the owner demands user_epsilon",
        "the node's machine, and that all but user-conspirators (or conspirators) of the secure-least clients are "
        "honest; fewer conspirators than the threshold allows",
    ),
    SECURE_PRIVATE: Threat(
        "secure sums and the owner's example-level privacy",
        "the sum of noisy updates",
        "the node's machine alone, for what ε covers",
    ),
}
# Of the sections of that page that no mode changes.
NOT_PROTECTED = (
    "numbers of examples, names of columns, the shape of an example, who is connected and when, and which requests "
    "were refused",
    "what ε does not cover of a method, and validation rows of methods that choose by them",
    "a personal model that a site publishes, beyond what its training was private",
    "results: a site can send any update within the checks, and the server can report anything",
)


def mode_of(*, secure: bool, private: bool, user: bool, at_nodes: bool) -> str:
    """The mode of a run with these protections."""
    if secure:
        return AT_NODES if at_nodes else SECURE_PRIVATE if private else USER if user else SECURE
    return USER if user else PRIVATE if private else PLAIN
