"""Compares the licences of a student's encoder and teachers with the licence that the student is published under.

Whether a student is an adaptation of its teachers is a question of law that no table answers. The warnings assume that
it is. Identifiers are those of https://huggingface.co/docs/hub/repositories-licenses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from amalgam.stages.common.models.read_card import Source


@dataclass(frozen=True)
class Restriction:
    meaning: str
    advice: str


NON_COMMERCIAL = Restriction("permits no commercial use", "publish the student under a non-commercial licence")
RESEARCH = Restriction("permits research only", "publish the student for research only")
NO_DERIVATIVES = Restriction(
    "permits no distribution of adaptations", "publish the student with the authors' permission only"
)
SHARE_ALIKE = Restriction("requires adaptations to have the same licence", "publish the student under that licence")
OWN_TERMS = Restriction("has terms of its own", "read them, and repeat the conditions that they pass on")
UNSTATED = Restriction("states no licence", "without one nothing is permitted, so get permission")
GATED = Restriction("is gated", "check that its conditions of access permit the student")

FREE = frozenset(
    {
        *("afl-3.0", "apache-2.0", "artistic-2.0", "bsd", "bsd-2-clause", "bsd-3-clause", "bsd-3-clause-clear"),
        *("bsl-1.0", "cc-by-2.0", "cc-by-2.5", "cc-by-3.0", "cc-by-4.0", "cc0-1.0", "cdla-permissive-1.0"),
        *("cdla-permissive-2.0", "ecl-2.0", "etalab-2.0", "isc", "mit", "ms-pl", "ncsa", "odc-by", "openmdw-1.0"),
        *("pddl", "postgresql", "unlicense", "wtfpl", "zlib"),
    }
)
"""Licences that permit adaptations under any licence, if the authors are named."""

RESTRICTED: dict[str, tuple[Restriction, ...]] = {
    # https://creativecommons.org/share-your-work/cclicenses
    **dict.fromkeys(("cc-by-nc-2.0", "cc-by-nc-3.0", "cc-by-nc-4.0"), (NON_COMMERCIAL,)),
    **dict.fromkeys(("cc-by-nc-sa-2.0", "cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0"), (NON_COMMERCIAL, SHARE_ALIKE)),
    **dict.fromkeys(("cc-by-nc-nd-3.0", "cc-by-nc-nd-4.0"), (NON_COMMERCIAL, NO_DERIVATIVES)),
    "cc-by-nd-4.0": (NO_DERIVATIVES,),
    **dict.fromkeys(("cc-by-sa-3.0", "cc-by-sa-4.0"), (SHARE_ALIKE,)),
    # https://www.gnu.org/licenses/license-list.html and https://opensource.org/licenses
    **dict.fromkeys(("agpl-3.0", "gpl", "gpl-2.0", "gpl-3.0", "gfdl", "osl-3.0"), (SHARE_ALIKE,)),
    **dict.fromkeys(("lgpl", "lgpl-2.1", "lgpl-3.0", "lgpl-lr", "mpl-2.0", "lppl-1.3c"), (SHARE_ALIKE,)),
    **dict.fromkeys(("epl-1.0", "epl-2.0", "eupl-1.1", "eupl-1.2"), (SHARE_ALIKE,)),
    # https://opendatacommons.org/licenses and https://cdla.dev
    **dict.fromkeys(("odbl", "cdla-sharing-1.0"), (SHARE_ALIKE,)),
    # The licences' own titles: each is linked from the Hub's list.
    "fair-noncommercial-research-license": (NON_COMMERCIAL, RESEARCH),
    **dict.fromkeys(("apple-amlr", "h-research", "intel-research"), (RESEARCH,)),
    **dict.fromkeys(("bigcode-openrail-m", "bigscience-bloom-rail-1.0", "bigscience-openrail-m"), (OWN_TERMS,)),
    **dict.fromkeys(("creativeml-openrail-m", "openrail", "openrail++", "deepfloyd-if-license"), (OWN_TERMS,)),
    **dict.fromkeys(("gemma", "llama2", "llama3", "llama3.1", "llama3.2", "llama3.3", "llama4"), (OWN_TERMS,)),
    **dict.fromkeys(("apple-ascl", "c-uda", "cc", "ofl-1.1", "other"), (OWN_TERMS,)),
    "unknown": (UNSTATED,),
}

LICENCES = frozenset({*FREE, *RESTRICTED})


def warnings(sources: Iterable[Source], published: Sequence[str]) -> list[str]:
    """Returns a sentence for each restriction of a source that the student's licence does not repeat."""
    lines = []
    for source in sources:
        licences = source.licences
        listed = ((licence, RESTRICTED.get(licence, () if licence in FREE else (OWN_TERMS,))) for licence in licences)
        restrictions = {(licence, item) for licence, items in listed for item in items}
        lines += [
            _sentence(source, licence, restriction)
            for licence, restriction in sorted(restrictions, key=lambda pair: (pair[0], pair[1].meaning))
            if not _repeated(restriction, licence, published)
        ]
        lines += [_sentence(source, "", UNSTATED)] * (not licences) + [_sentence(source, "", GATED)] * source.gated
    return lines


def common_licence(sources: Sequence[Source]) -> str | None:
    """Returns the licence that every source states, if it is one and the student may have it; else None."""
    stated = {tuple(source.licences) for source in sources}
    licences = stated.pop() if len(stated) == 1 else ()
    if len(licences) != 1 or licences[0] not in LICENCES:
        return None
    restrictions = RESTRICTED.get(licences[0], ())
    return licences[0] if {NON_COMMERCIAL, RESEARCH, SHARE_ALIKE} >= set(restrictions) else None


def _repeated(restriction: Restriction, licence: str, published: Sequence[str]) -> bool:
    """Returns whether the student's licence has the restriction too."""
    if restriction in (NO_DERIVATIVES, OWN_TERMS, UNSTATED):
        return False
    if restriction is SHARE_ALIKE:
        return licence in published
    return any(restriction in RESTRICTED.get(entry, ()) for entry in published)


def _sentence(source: Source, licence: str, restriction: Restriction) -> str:
    name = source.licence_name if licence == "other" else None
    stated = f", {licence}{f' ({name})' if name else ''}," if licence else ""
    return f"{source.role}{stated} {restriction.meaning}: {restriction.advice}"
