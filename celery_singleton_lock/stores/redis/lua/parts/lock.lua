-- The places of a lock, the holders that have them, and the answer to a caller who gets none.
local integer, words_in, expire_after, read_numbered, refused
local read_places, grant_in, grant_of, set_deadline, places_of, is_on_hold, ask_to_stop, let_holders_stay, empty_place
local described, described_calls, has_ended, note_end
local A_FEW = 8 -- holders, or calls that go before, in an answer

-- A number or a moment as fields and answers have it.
function integer(number)
  return string.format('%.0f', number)
end

-- The words of an argument by their names: `name=value`, or a name alone, with an empty value.
function words_in(text)
  local words = {}
  for name, value in string.gmatch(text or '', '([%l_]+)=?(%S*)') do
    words[name] = value
  end
  return words
end

-- Never shorten the expiry.
function expire_after(key, microseconds)
  local milliseconds = math.ceil(microseconds / 1000)
  if redis.call('PEXPIRE', key, milliseconds, 'NX') == 0 then
    redis.call('PEXPIRE', key, milliseconds, 'GT')
  end
end

-- The fields of places and holders:
--   `<place>`           token of its holder. A token that begins with ~ keeps the place in a cool-down. One that begins with
--                       * takes the whole lock: it is granted while no place is taken, and keeps all others out.
--   `<token>`           deadline of that holder, or `!<token>` once the holder was asked to stop.
--   `broken:<token>`    the person who has asked the holder to stop. `replaced:<token>` is the successor that asked.
--   `<place>:`          the grant: its moment, by how much the fence is greater, ttl in milliseconds, pid, attempt,
--                       publication; then words, of which unknown ones are ignored. `no-result`: nobody else can read the
--                       holder's result. `ended`: the call has ended, although its run may go on. Before `ended`, at most
--                       64 bytes, because a longer value doubles the memory of the hash.
--   `<place>:i`         task id. `<place>:h` is the hostname.
--   `<place>:n`         task name, if the lock has another name; then '\31' and the label, if there is one.
--   `<place>:c`         a copy of the holder's message has come.
--   `places`            the highest place in use, if that is not 1.
--   `fence`             the greatest fence that was given.
local FACTS = {':', ':i', ':h', ':n', ':c'}

local AT_ONCE = 1000 -- fields that one command reads, because Lua's stack is limited

local function read_fields(key, names)
  local values = {}
  for start = 1, #names, AT_ONCE do
    for _, value in ipairs(redis.call('HMGET', key, unpack(names, start, math.min(#names, start + AT_ONCE - 1)))) do
      values[#values + 1] = value
    end
  end
  return values
end

-- The fields whose names are `before`, a number from `first` to `last`, and `behind`.
function read_numbered(key, before, first, last, behind)
  local names = {}
  for number = first, last do
    names[#names + 1] = before .. number .. behind
  end
  return read_fields(key, names)
end

function grant_in(value)
  local since, ahead, ttl, attempt, published = string.match(value or '', '^(%d+) ?(%S*) ?(%d*) ?%S* ?(%d*) ?(%d*)')
  local granted_at = tonumber(since) or 0
  return {
    since = granted_at, fence = granted_at + (tonumber(ahead) or 0), ttl = tonumber(ttl) or 0,
    attempt = tonumber(attempt) or 0, published = tonumber(published) or 0,
  }
end

function grant_of(key, place)
  return grant_in(redis.call('HGET', key, place .. ':'))
end

-- Whether the call of a grant has ended, although its run may still hold the place.
function has_ended(grant)
  return string.find((grant or '') .. ' ', ' ended ', 1, true) ~= nil
end

function note_end(key, places, task_id)
  redis.call('HDEL', key, '') -- a server out of memory refuses HSET as the first write of a script
  for place, id in ipairs(read_numbered(key, '', 1, #places, ':i')) do
    local grant = id == task_id and redis.call('HGET', key, place .. ':')
    if grant and not has_ended(grant) then
      redis.call('HSET', key, place .. ':', grant .. ' ended')
    end
  end
end

-- A holder that was asked to stop stays so.
function set_deadline(key, each, deadline)
  redis.call('HSET', key, (each.asked_to_stop and '!' or '') .. each.token, integer(deadline))
end

function is_on_hold(token)
  return string.sub(token, 1, 1) == '~'
end

-- The number of places that a token takes.
local ALL = 1000000 -- more than any limit
function places_of(token)
  return string.sub(token, 1, 1) == '*' and ALL or 1
end

-- All places in order, as {place, token, deadline, alive, asked_to_stop}. The token of an empty place is nil. A holder is
-- alive until its deadline, even if it was asked to stop.
function read_places(key, highest)
  local tokens = read_numbered(key, '', 1, highest, '')
  local names, places = {}, {}
  for place = 1, highest do
    names[place] = tokens[place] or ''
  end
  for place, deadline in ipairs(read_fields(key, names)) do
    local token, asked_to_stop = tokens[place] or nil, false
    if token and not deadline then
      deadline, asked_to_stop = redis.call('HGET', key, '!' .. token), true
    end
    deadline = tonumber(deadline or 0)
    local alive = token and deadline > now
    places[place] = {place = place, token = token, deadline = deadline, alive = alive, asked_to_stop = asked_to_stop}
  end
  return places
end

function ask_to_stop(key, each)
  if not each.asked_to_stop then
    each.asked_to_stop = true
    set_deadline(key, each, each.deadline)
    redis.call('HDEL', key, each.token)
  end
end

-- Take back a successor's request to stop, which the holders may not have heard yet. A person's request stays.
function let_holders_stay(key, places)
  for _, each in ipairs(places) do
    if each.alive and each.asked_to_stop and redis.call('HEXISTS', key, 'broken:' .. each.token) == 0 then
      redis.call('HDEL', key, '!' .. each.token)
      redis.call('HSET', key, each.token, integer(each.deadline))
    end
  end
end

function empty_place(key, place, token)
  local names = {place, token, '!' .. token, 'broken:' .. token, 'replaced:' .. token}
  for _, suffix in ipairs(FACTS) do
    names[#names + 1] = place .. suffix
  end
  redis.call('HDEL', key, unpack(names))
end

-- Holders are told as seven values each: place, token, deadline, grant, task id, hostname, task name and label.
local function add_values(holders, values)
  for i = 1, 7 do
    holders[#holders + 1] = values[i] or ''
  end
end

-- At most `most` of the holders; the one whose lease ends first is always told.
function described(key, places, most)
  local alive, holders = {}, {}
  for _, each in ipairs(places) do
    if each.alive then
      alive[#alive + 1] = each
      if each.deadline < alive[1].deadline then
        alive[1], alive[#alive] = each, alive[1]
      end
    end
  end
  for i = 1, math.min(#alive, most) do
    local place = alive[i].place
    local facts = redis.call('HMGET', key, place .. ':', place .. ':i', place .. ':h', place .. ':n')
    add_values(holders, {place, alive[i].token, integer(alive[i].deadline), unpack(facts)})
  end
  return holders
end

-- Calls that hold nothing, told as holders. Instead of a place they have the word for their state. Instead of a hostname
-- they have the queue of the message. Instead of a grant they have four numbers, 0 if unknown: the publication; how
-- many milliseconds before the end of a mark the call is due; 1 if a turn is unheard; the moment of a turn's rank.
function described_calls(calls, most)
  local rows = {}
  for i = 1, math.min(#calls, most or A_FEW) do
    local each = calls[i]
    local numbers = {each.published or 0, each.due_for or 0, each.is_unheard and 1 or 0, each.rank or 0}
    for number, value in ipairs(numbers) do
      numbers[number] = integer(value)
    end
    local name = (each.task_name or '') .. (each.label and '\31' .. each.label or '')
    local ends_at = integer(math.max(each.deadline, now))
    add_values(rows, {each.word, each.token, ends_at, table.concat(numbers, ' '), each.task_id, each.queue, name})
  end
  return rows
end

-- The answer to a caller that gets no place. `successor` is the task id of the call that runs next, or an empty text. If
-- the caller has a turn, `rank` is the moment of its rank; `near` and `free_in` are those of `looked` in acquire.lua.
function refused(successor, holders, rank, near, free_in)
  return {'held', now, successor, holders, rank, near, free_in}
end
