"""Lines on which tokenizers are known to disagree: every new tokenizer.json is tried on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

ADVERSARIAL_LINES: tuple[str, ...] = (
    "",
    " ",
    "\u2581",
    " \t\r\n\u00a0\u3000 ",
    "one",
    "  two  spaces \t tabs\nand newlines\r\n\r\nand more  ",
    "e\u0301cole, \u00e9cole, E\u0301COLE, A\u030angstr\u00f6m \u212b, q\u0323\u0307 q\u0307\u0323, h\u0331 H\u0331",
    "zero\u200bwidth, soft\u00adhyphen, \ufeffbom, non\u200cjoiner, word\u2060joiner, e\u200b\u0301",
    "\u2581the\u2581metaspace \u2581\u2581 itself\u2581",
    "nul \x00 and \x07 control \x1b[0m \x7f \x85next \x1c \x1f characters\x00",
    "\x00\u200b starts with nothing",
    "\u1780\u17d2\u200b\u178f\u1793\u200b\u0e44\u0e17\u0e22\u200b \u200b\u200bspaces\u200b\u0301 of\u200b",
    "\u061cmark\u0301\u061c\u0323 \u2061\u2063operators\u2064 \u206aold\u206f \U0001d173\U0001bca3\U000e0001",
    "\u180e \u0600\u06dd1 \u070f \u08e2 \U000110bd \U00013430 \U0001f3f4\U000e0067\U000e0062\U000e007f",
    "\U000e0001\u200b\u061c",
    "\u061c\u206e\u0301e\u200b\u061c\u200b[MASK]\u200b\u061c.\u200b[SEP]",
    "lone surrogates \ud800 and \udc00 and \udfff\ud83d",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f3f3\ufe0f\u200d\U0001f308 "
    "\U0001f44d\U0001f3fd "
    "\U0001f1eb\U0001f1f7 \U0001faea 1\ufe0f\u20e3",
    "\u0645\u0631\u062d\u0628\u0627 \u202b\u05e9\u05dc\u05d5\u05dd\u202c "
    "\u05e9\u05b8\u05c1\u05dc\u05d5\u05b9\u05dd\u200f! "
    "\u0627\u0653 \ufefb",
    "private \ue000\uf8ff\U00100000 unassigned \u0378\U000e0fff noncharacters \ufdd0\uffff\U0010ffff",
    "[MASK] [CLS][SEP] [PAD]s [UNK]. [MASK], [MASK]. a[MASK]b  [MASK]",
    "<0x41><0x0A> <s></s> <unk> <pad> ##ing \u0120the \u2585 \u2047",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u6211\u5f88\u597d\uff01 \uc548\ub155 \u1112\u1161\u11ab "
    "\u304b\u3099 \u0e19\u0e49\u0e33 \u0915\u094d\u0937\u093f",
    "\ufb01ne \uff26\uff35\uff2c\uff2c \u2460 \u00bd x\u00b2 \u00b4 \u00a8 \u2121 \ufe70 \u3382 "
    "\u1e9b\u0323 \u32ff \u0132",
    "\u0130STANBUL \u0131 \u039f\u0394\u03a5\u03a3\u03a3\u0395\u03a5\u03a3 \u03a3. STRASSE \u1e9e "
    "\u01c5 \ua7cb\ua7da\u1c89 \u13a0\uab70 \u2c2f",
    "\u0897\u0301 \u1acf\u0323 a\u0301\u089d\u0323 \U00011938 \U00011935\U00011930 \U000105d2\u0307 "
    "\U0001e030 \U0001d15e",
    "a" * 300
    + " "
    + "ab" * 150
    + " "
    + "aab" * 99
    + " "
    + "." * 77
    + " "
    + "-" * 78
    + " "
    + "0" * 51
    + " "
    + "\u00e9" * 33,
    'https://example.org/a?b=c&d=%20#e user@example.org C:\\path\\file.txt {"k": [1, 2.5e-10]} $\\frac{a}{b}$ <b>x</b>',
    "don't 'quote' \u201cquote\u201d it\u2019s \u2026 \u2014 100,000.00 3rd 50% A/B x=y; i++",
    " a",
    "a ",
    "\n\na\n\n",
    "\u0301 starts with a mark \u0301\u0301",
    "\u0301first",
    "\ufefffirst",
    "\u00ad\u200b\u0301\u00e9first",
    "\ufeff",
)
"""Lines on which tokenizers are known to disagree."""


def lines_with_symbols(symbols: Sequence[str]) -> Iterator[str]:
    """Yield lines full of user symbols: at both ends, within words, beside punctuation, each other and literals."""
    for symbol, other in zip(symbols, [*symbols[1:], *symbols[:1]], strict=True):
        yield symbol
        yield f"{symbol} first, then {symbol}. Mid{symbol}word,{symbol}!({symbol}) {symbol}{symbol}{other} end{symbol}"
        yield f" {symbol[:-1]} {symbol[1:]} {symbol}{symbol[1:]} {symbol[:-1]}{symbol} {symbol.upper()} {symbol}\u0301"
        yield f"\u200b{symbol}<0x41>{symbol}<0x0A> x{symbol}[UNK]{other}[MASK]{symbol} {other}\u2581{symbol}\n{symbol}"
