"""Three-letter codes of languages that have a code of two letters, which sentence splitting and filters use."""

from __future__ import annotations

_PAIRS = (
    # ISO 639-3
    "aar aa abk ab ave ae afr af aka ak amh am arg an ara ar asm as ava av aym ay aze az bak ba bel be bul bg bih bh "
    "bis bi bam bm ben bn bod bo bre br bos bs cat ca che ce cha ch cos co cre cr ces cs chu cu chv cv cym cy dan da "
    "deu de div dv dzo dz ewe ee ell el eng en epo eo spa es est et eus eu fas fa ful ff fin fi fij fj fao fo fra fr "
    "fry fy gle ga gla gd glg gl grn gn guj gu glv gv hau ha heb he hin hi hmo ho hrv hr hat ht hun hu hye hy her hz "
    "ina ia ind id ile ie ibo ig iii ii ipk ik ido io isl is ita it iku iu jpn ja jav jv kat ka kon kg kik ki kua kj "
    "kaz kk kal kl khm km kan kn kor ko kau kr kas ks kur ku kom kv cor kw kir ky lat la ltz lb lug lg lim li lin ln "
    "lao lo lit lt lub lu lav lv mlg mg mah mh mri mi mkd mk mal ml mon mn mar mr msa ms mlt mt mya my nau na nob nb "
    "nde nd nep ne ndo ng nld nl nno nn nor no nbl nr nav nv nya ny oci oc oji oj orm om ori or oss os pan pa pli pi "
    "pol pl pus ps por pt que qu roh rm run rn ron ro rus ru kin rw san sa srd sc snd sd sme se sag sg hbs sh sin si "
    "slk sk slv sl smo sm sna sn som so sqi sq srp sr ssw ss sot st sun su swe sv swa sw tam ta tel te tgk tg tha th "
    "tir ti tuk tk tgl tl tsn tn ton to tur tr tso ts tat tt twi tw tah ty uig ug ukr uk urd ur uzb uz ven ve vie vi "
    "vol vo wln wa wol wo xho xh yid yi yor yo zha za zho zh zul zu "
    # ISO 639-2, where its bibliographic code differs
    "alb sq arm hy baq eu bur my chi zh cze cs dut nl fre fr geo ka ger de gre el ice is mac mk mao mi may ms per fa "
    "rum ro slo sk tib bo wel cy "
    # The languages that most texts of a macrolanguage are in
    "arb ar cmn zh pes fa zsm ms swh sw lvs lv ekk et npi ne ory or uzn uz khk mn azj az als sq plt mg gaz om ydd yi "
    "kmr ku pbt ps quy qu ayr ay"
).split()
TWO_LETTER_CODES: dict[str, str] = dict(zip(_PAIRS[::2], _PAIRS[1::2], strict=True))
"""Code of ISO 639-1 by code of ISO 639-3 or 639-2, such as "de" by "deu" and by "ger"."""
