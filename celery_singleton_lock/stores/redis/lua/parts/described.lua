-- Holders in the form for callers, seven values each: place, token, deadline, grant, task id, hostname, task name.
local A_FEW = 8

-- A few of the holders, among them the one whose lease ends first.
local function described(key, places, most)
  local alive, holders = {}, {}
  for _, each in ipairs(places) do
    if each.alive then
      alive[#alive + 1] = each
      if each.deadline < alive[1].deadline then
        alive[1], alive[#alive] = each, alive[1]
      end
    end
  end
  local names, count = {}, math.min(#alive, most)
  for i = 1, count do
    for k, suffix in ipairs({':', ':i', ':h', ':n'}) do
      names[4 * i - 4 + k] = alive[i].place .. suffix
    end
  end
  local facts = count > 0 and read_fields(key, names) or {}
  for i = 1, count do
    local at, first = #holders, 4 * i - 3
    holders[at + 1], holders[at + 2], holders[at + 3] = alive[i].place, alive[i].token, integer(alive[i].deadline)
    holders[at + 4], holders[at + 5] = facts[first] or '', facts[first + 1] or ''
    holders[at + 6], holders[at + 7] = facts[first + 2] or '', facts[first + 3] or ''
  end
  return holders
end

-- A few of the calls that go before, described as the holders that they will be.
local function described_turns(turns)
  local holders = {}
  for i = 1, math.min(#turns, A_FEW) do
    for _, value in ipairs({'', turns[i].token or '', integer(turns[i].deadline), '', turns[i].task_id, '', ''}) do
      holders[#holders + 1] = value
    end
  end
  return holders
end
