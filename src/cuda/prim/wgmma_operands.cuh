// SPDX-License-Identifier: MIT
// The accumulators d[4] to d[128] of a warpgroup product as inline assembly wants them: the
// operands %0, %1, ... of the instruction text, and the list of outputs with `io` "+" or "=".
#pragma once

#define COTERIE_WGMMA_D4 "%0,%1,%2,%3"
#define COTERIE_WGMMA_D16 COTERIE_WGMMA_D4 ",%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define COTERIE_WGMMA_D32 \
  COTERIE_WGMMA_D16       \
  ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define COTERIE_WGMMA_D64                                                             \
  COTERIE_WGMMA_D32                                                                   \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51," \
  "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define COTERIE_WGMMA_D128                                                            \
  COTERIE_WGMMA_D64                                                                   \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83," \
  "%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,"   \
  "%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,"  \
  "%119,%120,%121,%122,%123,%124,%125,%126,%127"

#define COTERIE_WGMMA_OUT4(io) io "f"(d[0]), io "f"(d[1]), io "f"(d[2]), io "f"(d[3])
#define COTERIE_WGMMA_OUT16(io)                                                                 \
  COTERIE_WGMMA_OUT4(io), io "f"(d[4]), io "f"(d[5]), io "f"(d[6]), io "f"(d[7]), io "f"(d[8]), \
      io "f"(d[9]), io "f"(d[10]), io "f"(d[11]), io "f"(d[12]), io "f"(d[13]), io "f"(d[14]),  \
      io "f"(d[15])
#define COTERIE_WGMMA_OUT32(io)                                                                 \
  COTERIE_WGMMA_OUT16(io), io "f"(d[16]), io "f"(d[17]), io "f"(d[18]), io "f"(d[19]),          \
      io "f"(d[20]), io "f"(d[21]), io "f"(d[22]), io "f"(d[23]), io "f"(d[24]), io "f"(d[25]), \
      io "f"(d[26]), io "f"(d[27]), io "f"(d[28]), io "f"(d[29]), io "f"(d[30]), io "f"(d[31])
#define COTERIE_WGMMA_OUT64(io)                                                                 \
  COTERIE_WGMMA_OUT32(io), io "f"(d[32]), io "f"(d[33]), io "f"(d[34]), io "f"(d[35]),          \
      io "f"(d[36]), io "f"(d[37]), io "f"(d[38]), io "f"(d[39]), io "f"(d[40]), io "f"(d[41]), \
      io "f"(d[42]), io "f"(d[43]), io "f"(d[44]), io "f"(d[45]), io "f"(d[46]), io "f"(d[47]), \
      io "f"(d[48]), io "f"(d[49]), io "f"(d[50]), io "f"(d[51]), io "f"(d[52]), io "f"(d[53]), \
      io "f"(d[54]), io "f"(d[55]), io "f"(d[56]), io "f"(d[57]), io "f"(d[58]), io "f"(d[59]), \
      io "f"(d[60]), io "f"(d[61]), io "f"(d[62]), io "f"(d[63])
#define COTERIE_WGMMA_OUT128(io)                                                                \
  COTERIE_WGMMA_OUT64(io), io "f"(d[64]), io "f"(d[65]), io "f"(d[66]), io "f"(d[67]),          \
      io "f"(d[68]), io "f"(d[69]), io "f"(d[70]), io "f"(d[71]), io "f"(d[72]), io "f"(d[73]), \
      io "f"(d[74]), io "f"(d[75]), io "f"(d[76]), io "f"(d[77]), io "f"(d[78]), io "f"(d[79]), \
      io "f"(d[80]), io "f"(d[81]), io "f"(d[82]), io "f"(d[83]), io "f"(d[84]), io "f"(d[85]), \
      io "f"(d[86]), io "f"(d[87]), io "f"(d[88]), io "f"(d[89]), io "f"(d[90]), io "f"(d[91]), \
      io "f"(d[92]), io "f"(d[93]), io "f"(d[94]), io "f"(d[95]), io "f"(d[96]), io "f"(d[97]), \
      io "f"(d[98]), io "f"(d[99]), io "f"(d[100]), io "f"(d[101]), io "f"(d[102]),             \
      io "f"(d[103]), io "f"(d[104]), io "f"(d[105]), io "f"(d[106]), io "f"(d[107]),           \
      io "f"(d[108]), io "f"(d[109]), io "f"(d[110]), io "f"(d[111]), io "f"(d[112]),           \
      io "f"(d[113]), io "f"(d[114]), io "f"(d[115]), io "f"(d[116]), io "f"(d[117]),           \
      io "f"(d[118]), io "f"(d[119]), io "f"(d[120]), io "f"(d[121]), io "f"(d[122]),           \
      io "f"(d[123]), io "f"(d[124]), io "f"(d[125]), io "f"(d[126]), io "f"(d[127])
